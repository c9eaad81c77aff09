"""Expert kernels: the reference and the fast ones, for both activation formats."""
