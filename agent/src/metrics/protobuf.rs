//! The protobuf form of metrics: messages of `io.prometheus.client`, each after its length.

use prometheus::proto;
use prost::Message;

/// Content type of [`encode`].
pub const PROTOBUF_FORMAT: &str =
    "application/vnd.google.protobuf; proto=io.prometheus.client.MetricFamily; encoding=delimited";

#[derive(Clone, PartialEq, Message)]
struct Family {
    #[prost(string, optional, tag = "1")]
    name: Option<String>,
    #[prost(string, optional, tag = "2")]
    help: Option<String>,
    #[prost(int32, optional, tag = "3")]
    kind: Option<i32>,
    #[prost(message, repeated, tag = "4")]
    metrics: Vec<Metric>,
}

#[derive(Clone, PartialEq, Message)]
struct Metric {
    #[prost(message, repeated, tag = "1")]
    labels: Vec<Label>,
    #[prost(message, optional, tag = "2")]
    gauge: Option<Number>,
    #[prost(message, optional, tag = "3")]
    counter: Option<Number>,
    #[prost(message, optional, tag = "7")]
    histogram: Option<Histogram>,
    #[prost(int64, optional, tag = "6")]
    timestamp_ms: Option<i64>,
}

#[derive(Clone, PartialEq, Message)]
struct Label {
    #[prost(string, optional, tag = "1")]
    name: Option<String>,
    #[prost(string, optional, tag = "2")]
    value: Option<String>,
}

/// Gauges and counters have the same encoding.
#[derive(Clone, PartialEq, Message)]
struct Number {
    #[prost(double, optional, tag = "1")]
    value: Option<f64>,
}

#[derive(Clone, PartialEq, Message)]
struct Histogram {
    #[prost(uint64, optional, tag = "1")]
    count: Option<u64>,
    #[prost(double, optional, tag = "2")]
    sum: Option<f64>,
    #[prost(message, repeated, tag = "3")]
    buckets: Vec<Bucket>,
}

#[derive(Clone, PartialEq, Message)]
struct Bucket {
    #[prost(uint64, optional, tag = "1")]
    cumulative_count: Option<u64>,
    #[prost(double, optional, tag = "2")]
    upper_bound: Option<f64>,
}

/// All families, one message after the other.
pub fn encode(families: &[proto::MetricFamily]) -> Vec<u8> {
    families.iter().flat_map(|family| message(family).encode_length_delimited_to_vec()).collect()
}

fn message(family: &proto::MetricFamily) -> Family {
    let kind = match family.get_field_type() {
        proto::MetricType::COUNTER => 0,
        proto::MetricType::GAUGE => 1,
        proto::MetricType::SUMMARY => 2,
        proto::MetricType::UNTYPED => 3,
        proto::MetricType::HISTOGRAM => 4,
    };
    Family {
        name: Some(family.name().to_owned()),
        help: Some(family.help().to_owned()),
        kind: Some(kind),
        metrics: family.get_metric().iter().map(|found| metric(found, family.get_field_type())).collect(),
    }
}

fn metric(found: &proto::Metric, kind: proto::MetricType) -> Metric {
    let label =
        |pair: &proto::LabelPair| Label { name: Some(pair.name().to_owned()), value: Some(pair.value().to_owned()) };
    let number = |value: f64| Some(Number { value: Some(value) });
    let mut metric = Metric { labels: found.get_label().iter().map(label).collect(), ..Metric::default() };
    metric.timestamp_ms = Some(found.timestamp_ms()).filter(|at| *at != 0);
    match kind {
        proto::MetricType::COUNTER => metric.counter = number(found.get_counter().get_value()),
        proto::MetricType::GAUGE => metric.gauge = number(found.get_gauge().get_value()),
        proto::MetricType::HISTOGRAM => metric.histogram = Some(histogram(found.get_histogram())),
        // No family has these types.
        proto::MetricType::SUMMARY | proto::MetricType::UNTYPED => {}
    }
    metric
}

fn histogram(found: &proto::Histogram) -> Histogram {
    let bucket = |bucket: &proto::Bucket| Bucket {
        cumulative_count: Some(bucket.cumulative_count()),
        upper_bound: Some(bucket.upper_bound()),
    };
    Histogram {
        count: Some(found.get_sample_count()),
        sum: Some(found.get_sample_sum()),
        buckets: found.get_bucket().iter().map(bucket).collect(),
    }
}

#[cfg(test)]
mod tests {
    use prometheus::Histogram as Observed;
    use prometheus::HistogramOpts;
    use prometheus::IntCounterVec;
    use prometheus::Opts;
    use prometheus::Registry;

    use super::*;

    #[test]
    fn counters_and_histograms() {
        let registry = Registry::new();
        let counters = IntCounterVec::new(Opts::new("hits_total", "Hits."), &["path"]).expect("sound");
        let took = Observed::with_opts(HistogramOpts::new("took", "Time.").buckets(vec![1.0, 2.0])).expect("sound");
        registry.register(Box::new(counters.clone())).expect("new");
        registry.register(Box::new(took.clone())).expect("new");
        counters.with_label_values(&["/a"]).inc_by(3);
        took.observe(1.5);
        let encoded = encode(&registry.gather());
        let mut rest = &encoded[..];
        let first = Family::decode_length_delimited(&mut rest).expect("a message");
        let second = Family::decode_length_delimited(&mut rest).expect("another");
        assert!(rest.is_empty());
        assert_eq!((first.name.as_deref(), first.kind), (Some("hits_total"), Some(0)));
        assert_eq!(first.metrics[0].labels[0].value.as_deref(), Some("/a"));
        assert_eq!(first.metrics[0].counter, Some(Number { value: Some(3.0) }));
        let histogram = second.metrics[0].histogram.clone().expect("a histogram");
        assert_eq!((histogram.count, histogram.sum), (Some(1), Some(1.5)));
        assert_eq!(histogram.buckets[1], Bucket { cumulative_count: Some(1), upper_bound: Some(2.0) });
    }
}
