"""Tables, figures and reports, made from records."""
