//! Returns freed memory to the system.
//!
//! glibc raises its mmap threshold when large blocks are freed (`M_MMAP_THRESHOLD` in mallopt(3)) and then keeps them. The
//! BPF loader parses the kernel's type information once (about 25 MB for a moment). Does nothing with other C libraries.

/// From now on, blocks of 128 KiB and more are returned as soon as they are freed, in the whole process.
pub fn return_large_blocks() {
    // SAFETY: sets a parameter of the allocator to its own initial value, which also stops it from growing.
    #[cfg(target_env = "gnu")]
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, 128 * 1024);
    }
}

/// Returns all free pages.
pub fn return_all() {
    // SAFETY: it only releases memory that is free already.
    #[cfg(target_env = "gnu")]
    unsafe {
        libc::malloc_trim(0);
    }
}
