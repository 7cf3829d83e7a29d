"""The callbacks of trainers, in the real libraries."""
