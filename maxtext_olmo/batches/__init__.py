"""What a batch holds: filters, transforms, collation, and the step-indexed dataset."""
