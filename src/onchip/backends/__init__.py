"""Ways to run a region: the interpreter (the oracle), generated C++, the library."""
