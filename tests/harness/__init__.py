"""What tests share: ranks as processes, tiny models and runs."""
