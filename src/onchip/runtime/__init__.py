"""Running a plan: memory arena, program, guards, weights, verification."""
