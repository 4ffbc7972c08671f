"""The login half: reads what will be submitted, follows it without acting, and says what stands against it."""
