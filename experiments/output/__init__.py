"""Tables, figures and reports, made of records."""
