//! Settings of the allocator; returns memory that the process holds and does not need.
//!
//! glibc raises its mmap threshold when large blocks are freed (`M_MMAP_THRESHOLD` in mallopt(3)) and then keeps them. The
//! BPF loader parses the kernel's type information once (about 25 MB for a moment). With other C libraries, nothing is
//! done about freed memory.

/// Limits the allocator to two arenas and makes it return freed memory early. To be called before any thread is started.
pub fn limit_arenas() {
    #[cfg(target_env = "gnu")]
    {
        const TRIM_THRESHOLD: libc::c_int = 128 << 10;
        for (parameter, value) in [(libc::M_ARENA_MAX, 2), (libc::M_TRIM_THRESHOLD, TRIM_THRESHOLD)] {
            // SAFETY: mallopt reads two integers and changes the allocator's own state; no other thread exists yet.
            let accepted = unsafe { libc::mallopt(parameter, value) };
            debug_assert_eq!(accepted, 1, "mallopt({parameter}) refused {value}");
        }
    }
}

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
