"""Documents about renders: jobs, receipts, machines, and the folders that hand them over."""
