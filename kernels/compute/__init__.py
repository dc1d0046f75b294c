"""Kernels that touch this GPU only: routing."""
