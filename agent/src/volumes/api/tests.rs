//! Volumes from API objects on a real file system.
