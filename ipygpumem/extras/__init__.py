"""Optional features: a folder each, with its commands, its logic and its report. Nothing outside
imports one.
"""
