"""One page about one or several runs: what they recorded, and what their supervisors did."""
