"""Experts: the grouped GEMM over tokens sorted by expert."""
