"""What moves DATA beside a socket between processes of one machine; `data_path` is the seam."""
