"""Who holds which tokens, who sees whom, what each rank computes and sends at every hop: pure functions and data."""
