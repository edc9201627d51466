"""Fixtures of all tests."""

from tests.ray_cluster import ray_cluster, ray_driver

__all__ = ["ray_cluster", "ray_driver"]
