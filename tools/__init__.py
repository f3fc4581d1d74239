"""What looks at a machine, a schedule or a kernel without measuring it: doctor, show, export."""
