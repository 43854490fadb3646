//! Records shared by probes and agent.
#![no_std]
