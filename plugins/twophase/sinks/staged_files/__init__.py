"""What the sinks that stage files share: names of folders, the seal, the check of a manifest, receipts, the owner."""
