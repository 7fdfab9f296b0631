"""What sinks of files share: names of folders, the seal, the check of a manifest, receipts, the owner."""
