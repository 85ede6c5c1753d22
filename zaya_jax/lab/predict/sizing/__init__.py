"""Sizing rules: do the sizes of a configuration suit a GPU?"""
