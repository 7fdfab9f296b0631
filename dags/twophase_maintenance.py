"""Recovery every 5 minutes and the sweep each day, for every pipeline: every Airflow with Twophase wants these DAGs."""

from twophase.airflow import maintenance_dags

recover_dag, sweep_dag = maintenance_dags()
