//! The agent as a process, as its surroundings see it: service manager and span collector. No container runtime needed;
//! the agent waits for one.

mod agent;
mod spans;
mod systemd;
