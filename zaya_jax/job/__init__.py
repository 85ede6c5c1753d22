"""What makes several processes one job: they find and prove themselves, notice who is lost, and stop at one step."""
