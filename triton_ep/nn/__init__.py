"""MoE layers as torch modules."""
