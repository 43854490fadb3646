//! Metric families built for one scrape, with the time of measurement. Pure.

use prometheus::proto;
use prometheus::proto::MetricFamily;
use prometheus::proto::MetricType;

/// One family, empty at first.
pub(super) struct Family {
    name: &'static str,
    help: &'static str,
    kind: MetricType,
    metrics: Vec<proto::Metric>,
}

impl Family {
    pub(super) fn new(name: &'static str, help: &'static str, kind: MetricType) -> Self {
        Self { name, help, kind, metrics: Vec::new() }
    }

    pub(super) fn counter(name: &'static str, help: &'static str) -> Self {
        Self::new(name, help, MetricType::COUNTER)
    }

    pub(super) fn gauge(name: &'static str, help: &'static str) -> Self {
        Self::new(name, help, MetricType::GAUGE)
    }

    pub(super) fn name(&self) -> &'static str {
        self.name
    }

    pub(super) fn help(&self) -> &'static str {
        self.help
    }

    pub(super) fn kind(&self) -> MetricType {
        self.kind
    }

    /// Labels and values, without times.
    pub(super) fn samples(&self) -> impl Iterator<Item = (&[proto::LabelPair], f64)> {
        self.metrics.iter().map(|metric| {
            let is_counter = self.kind == MetricType::COUNTER;
            let value = if is_counter { metric.get_counter().get_value() } else { metric.get_gauge().get_value() };
            (metric.get_label(), value)
        })
    }

    /// No value was added: encoders reject such a family.
    pub(super) fn is_empty(&self) -> bool {
        self.metrics.is_empty()
    }

    /// Adds a value, if there is one. `at` is the moment it was measured, in nanoseconds since the Unix epoch.
    pub(super) fn add(&mut self, labels: &[(&str, &str)], value: Option<f64>, at: Option<i64>) {
        let Some(value) = value else { return };
        let mut metric = proto::Metric::default();
        let pair = |(name, value): &(&str, &str)| {
            let mut pair = proto::LabelPair::default();
            pair.set_name((*name).to_owned());
            pair.set_value((*value).to_owned());
            pair
        };
        metric.set_label(labels.iter().map(pair).collect());
        if self.kind == MetricType::COUNTER {
            let mut counter = proto::Counter::default();
            counter.set_value(value);
            metric.set_counter(counter);
        } else {
            let mut gauge = proto::Gauge::default();
            gauge.set_value(value);
            metric.set_gauge(gauge);
        }
        if let Some(at) = at {
            metric.set_timestamp_ms(at.div_euclid(1_000_000));
        }
        self.metrics.push(metric);
    }

    pub(super) fn into_family(self) -> MetricFamily {
        let mut family = MetricFamily::default();
        family.set_name(self.name.to_owned());
        family.set_help(self.help.to_owned());
        family.set_field_type(self.kind);
        family.set_metric(self.metrics);
        family
    }
}

#[expect(clippy::cast_precision_loss, reason = "the exposition has nothing but floating point numbers")]
pub(super) fn float(value: u64) -> f64 {
    value as f64
}

/// Nanoseconds since the Unix epoch in seconds.
pub(super) fn unix_seconds(nanos: i64) -> Option<f64> {
    u64::try_from(nanos).ok().map(|nanos| float(nanos) / 1e9)
}
