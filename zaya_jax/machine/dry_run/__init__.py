"""What a run would take on devices one does not have: memory, arithmetic, bytes on the wire, time."""
