"""The run (`run`), its reports (`report`) and its protection against faults (`safety`)."""
