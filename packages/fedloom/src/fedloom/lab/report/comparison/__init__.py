"""Comparison of methods: families of paired tests, criteria with their winners, and pairs with a reference."""
