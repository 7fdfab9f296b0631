"""The sink that sends the rows of a checkpoint to a Kafka topic in one transaction."""
