"""What runs inside Spark, and how it is submitted; imports neither Airflow nor SQLAlchemy."""
