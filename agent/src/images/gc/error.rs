//! Failures of image garbage collection, with the kubelet's texts.

use crate::runtime::RuntimeError;

/// A pass has failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GcError {
    /// Images or containers cannot be listed.
    #[error("{0}")]
    List(String),
    /// It is not known whether containers have mounted an image.
    #[error("get container status: {0}")]
    Status(String),
    /// The runtime has no image file system.
    #[error("imageFs information is unavailable")]
    NoFileSystem,
    /// Its size cannot be determined.
    #[error("get filesystem info: {0}")]
    FileSystem(String),
    /// Its size is zero.
    #[error("invalid capacity 0 on image filesystem")]
    InvalidCapacity,
    /// Unused images could not be removed.
    #[error("wanted to free images older than {age}, encountered errors in image deletion: {errors}")]
    Age {
        /// `imageMaximumGCAge`.
        age: String,
        /// What the runtime returned.
        errors: String,
    },
    /// Some of the images that were to be removed for their size could not be.
    #[error("wanted to free {wanted} bytes, but freed {freed} bytes space with errors in image deletion: {errors}")]
    Space {
        /// Bytes.
        wanted: u64,
        /// Bytes.
        freed: u64,
        /// What the runtime returned.
        errors: String,
    },
    /// All unused images together were not enough.
    #[error(
        "Insufficient free disk space on the node's image filesystem ({usage}% of {capacity} used). Failed to free \
         sufficient space by deleting unused images (freed {freed} bytes). Investigate disk usage, as it could be used by \
         active images, logs, volumes, or other data."
    )]
    NotEnough {
        /// Used percent before.
        usage: u64,
        /// The size of the file system, with its unit.
        capacity: String,
        /// Bytes.
        freed: u64,
    },
}

impl GcError {
    /// A list failed.
    pub(super) fn list(error: &RuntimeError) -> Self {
        Self::List(error.rpc_text())
    }
}

/// A number of bytes with a binary unit, as `1.5 KiB`.
pub(super) fn with_unit(bytes: u64) -> String {
    const UNITS: [&str; 4] = ["KiB", "MiB", "GiB", "TiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let fits = |index: &usize| bytes >> (10 * (index + 1)) < 1024;
    let index = (0..UNITS.len()).find(fits).unwrap_or(UNITS.len() - 1);
    let unit = 1_u128 << (10 * (index + 1));
    // Rounded to tenths, half to even as Go's formatting of the quotient does for exact halves.
    let (tenths, rest) = (u128::from(bytes) * 10 / unit, u128::from(bytes) * 10 % unit);
    let up = rest * 2 > unit || (rest * 2 == unit && tenths % 2 == 1);
    let tenths = tenths + u128::from(up);
    format!("{}.{} {}", tenths / 10, tenths % 10, UNITS[index])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_a_unit() {
        for (bytes, text) in [
            (0, "0 B"),
            (512, "512 B"),
            (1023, "1023 B"),
            (1024, "1.0 KiB"),
            (1536, "1.5 KiB"),
            (10 << 30, "10.0 GiB"),
            ((1 << 20) - 1, "1024.0 KiB"),
            (1 << 20, "1.0 MiB"),
            (5000 << 40, "5000.0 TiB"),
        ] {
            assert_eq!(with_unit(bytes), text, "{bytes}");
        }
    }

    #[test]
    fn the_messages_are_upstreams() {
        let error = GcError::NotEnough { usage: 95, capacity: with_unit(10 << 30), freed: 524_288_000 };
        assert_eq!(
            error.to_string(),
            "Insufficient free disk space on the node's image filesystem (95% of 10.0 GiB used). Failed to free sufficient \
             space by deleting unused images (freed 524288000 bytes). Investigate disk usage, as it could be used by \
             active images, logs, volumes, or other data."
        );
    }
}
