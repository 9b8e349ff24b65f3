"""Experts: the grouped GEMM over tokens sorted by expert (`grouped_linear.GroupedLinear`)."""
