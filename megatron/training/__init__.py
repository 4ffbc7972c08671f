"""The run (`run`), its reports (`report`) and what protects it (`safety`)."""
