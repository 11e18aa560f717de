"""Training arms side by side: what is compared, the runs, paired statistics, and the page."""
