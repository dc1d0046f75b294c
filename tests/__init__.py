"""Tests of triton_ep; the folders mirror the source."""
