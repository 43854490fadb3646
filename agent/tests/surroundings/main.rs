//! The agent as a process with a service manager and a span collector, without a container runtime.

mod agent;
mod spans;
mod systemd;
