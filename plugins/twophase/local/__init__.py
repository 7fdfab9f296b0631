"""What runs on one machine: embedded PostgreSQL, local Airflow and Spark cluster; and which record is used."""
