//! The room against a scripted API server, on paused time.
