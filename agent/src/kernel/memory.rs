//! Giving memory back to the system.
//!
//! The allocator of the C library learns from large blocks to keep them. That suits a program that needs them again; the
//! agent parses a kernel's type information once (some 25 MB for a moment, because the BPF loader does so whether it is
//! asked to or not) and then needs a fraction of that for the rest of its life. Does nothing with other C libraries.

/// From now on, blocks of 128 KiB and more go back to the system as soon as they are freed. For the whole process.
pub fn return_large_blocks() {
    // SAFETY: sets a parameter of the allocator to its own initial value, which also stops it from growing.
    #[cfg(target_env = "gnu")]
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, 128 * 1024);
    }
}

/// Gives back all whole pages that are free now.
pub fn return_all() {
    // SAFETY: it only releases memory that is free already.
    #[cfg(target_env = "gnu")]
    unsafe {
        libc::malloc_trim(0);
    }
}
