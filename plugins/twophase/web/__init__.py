"""The commit table in Airflow's UI: pages over the record, read-only, guarded by Airflow's own access checks."""
