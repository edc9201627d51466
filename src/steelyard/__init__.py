"""Structured regularizer composition: one base loss, named weighted terms, one beam."""
