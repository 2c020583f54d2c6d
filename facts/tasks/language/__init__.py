"""Texts and the tokens that follow."""
