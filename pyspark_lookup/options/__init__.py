"""Every `lookup.*` option with its type and default, the conf file, and the options of catalog tables."""
