"""What is built and run: cost, measuring, the plan; the machine's ceilings; doctor."""
