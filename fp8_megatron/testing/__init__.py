"""What tests share: seeded inputs, worlds of ranks, numeric comparison."""
