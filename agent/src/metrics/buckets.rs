//! Upper bounds of histogram buckets, in seconds.

/// Upstream's usual buckets.
pub(super) const USUAL: &[f64] = &[0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0];

/// Start of a pod.
pub(super) const POD_START: &[f64] = &[
    0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 20.0, 30.0, 45.0, 60.0, 120.0, 180.0, 240.0, 300.0, 360.0, 480.0,
    600.0, 900.0, 1200.0, 1800.0, 2700.0, 3600.0,
];

/// Status of a pod, from its change to the API server.
pub(super) const STATUS_SYNC: &[f64] = &[0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 20.0, 30.0, 45.0, 60.0];

/// Calls to the runtime: fourteen powers of 2.5 from 5 ms on.
pub(super) const RUNTIME_CALL: &[f64] = &[
    0.005,
    0.0125,
    0.03125,
    0.078125,
    0.1953125,
    0.48828125,
    1.220703125,
    3.0517578125,
    7.62939453125,
    19.073486328125,
    47.6837158203125,
    119.20928955078125,
    298.0232238769531,
    745.0580596923828,
];

/// Pull of an image.
pub(super) const IMAGE_PULL: &[f64] = &[
    1.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 180.0, 240.0, 300.0, 360.0, 480.0, 600.0, 900.0, 1200.0, 1800.0, 2700.0,
    3600.0,
];

/// Reviews by the API server.
pub(super) const REVIEW: &[f64] = &[0.25, 0.5, 0.7, 1.0, 1.5, 3.0, 5.0, 10.0];

/// Remaining validity of certificates.
pub(super) const EXPIRATION: &[f64] = &[
    0.0,
    1800.0,
    3600.0,
    7200.0,
    21600.0,
    43200.0,
    86400.0,
    172_800.0,
    345_600.0,
    604_800.0,
    2_592_000.0,
    7_776_000.0,
    15_552_000.0,
    31_104_000.0,
];

/// Ages of serving certificates at their rotation.
pub(super) const ROTATION: &[f64] =
    &[60.0, 3600.0, 14_400.0, 86_400.0, 604_800.0, 2_592_000.0, 7_776_000.0, 15_552_000.0, 31_104_000.0, 124_416_000.0];

/// Ages of the certificates of credential plugins.
pub(super) const AGE: &[f64] = &[
    600.0,
    1800.0,
    3600.0,
    14400.0,
    86400.0,
    604_800.0,
    2_592_000.0,
    7_776_000.0,
    15_552_000.0,
    31_104_000.0,
    124_416_000.0,
];

/// Containers in a pod.
pub(super) const CONTAINERS: &[f64] = &[1.0, 2.0, 4.0, 8.0, 16.0];

/// keblet's own latencies: from a tenth of a millisecond, where kernel events lie, to where polling ends.
pub(super) const LATENCY: &[f64] =
    &[0.0001, 0.00025, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0];

/// Pure computation.
pub(super) const COMPUTE: &[f64] = &[0.000_01, 0.000_025, 0.000_05, 0.0001, 0.00025, 0.0005, 0.001, 0.005, 0.01, 0.1];

/// Requests to the API server.
pub(super) const REQUEST: &[f64] = &[0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0];

/// Bodies of requests to the API server, in bytes.
pub(super) const BYTES: &[f64] =
    &[64.0, 256.0, 512.0, 1024.0, 4096.0, 16384.0, 65536.0, 262_144.0, 1_048_576.0, 4_194_304.0, 16_777_216.0];

/// Resolution of names.
pub(super) const LOOKUP: &[f64] = &[0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0];

/// Operations on volumes.
pub(super) const STORAGE: &[f64] = &[0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 15.0, 25.0, 50.0, 120.0, 300.0, 600.0];
