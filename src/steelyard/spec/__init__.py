"""Specs of terms: `RegularizerSpec`, the protocols it accepts, registry, weights, schedules."""
