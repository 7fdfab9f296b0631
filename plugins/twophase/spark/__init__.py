"""What runs inside Spark: no Airflow, no SQLAlchemy."""
