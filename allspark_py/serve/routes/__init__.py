"""The routes by topic; each module makes a router."""
