//! Plots the distribution of values as an SVG: the share of values (upwards) up to each time (to the right,
//! logarithmic).

use anyhow::anyhow;
use plotters::prelude::*;

use super::Metric;
use crate::results::Results;
use crate::results::Series;

const SIZE: (u32, u32) = (860, 300);
/// Margin beside the least and the greatest time, in powers of ten.
const MARGIN: f64 = 0.08;
/// Colours that can be distinguished also with common colour-vision deficiencies.
const PALETTE: [RGBColor; 8] = [
    RGBColor(120, 120, 120),
    RGBColor(20, 20, 20),
    RGBColor(0, 114, 178),
    RGBColor(86, 180, 233),
    RGBColor(230, 159, 0),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
];

/// The colour of a participant in CSS.
pub(super) fn css_colour(participant: usize) -> String {
    let RGBColor(red, green, blue) = PALETTE[participant % PALETTE.len()];
    format!("rgb({red},{green},{blue})")
}

/// The plot, `None` if no participant has more than a single value.
pub(super) fn distribution(
    participants: &[String],
    results: &Results,
    metric: Metric,
) -> anyhow::Result<Option<String>> {
    let lines: Vec<_> = participants
        .iter()
        .enumerate()
        .filter_map(|(index, participant)| Some((index, steps(results.get(metric, participant)?)?)))
        .collect();
    let times = || lines.iter().flat_map(|(_, line)| line.iter().map(|(time, _)| *time));
    // Logarithms on a linear axis: a logarithmic axis labels only powers of ten, of which there may be none in the
    // range.
    let (Some(least), Some(most)) = (times().reduce(f64::min), times().reduce(f64::max)) else { return Ok(None) };
    let mut svg = String::new();
    draw(&mut svg, metric, &lines, least.log10() - MARGIN..most.log10() + MARGIN)
        .map_err(|error| anyhow!("cannot plot: {error}"))?;
    Ok(Some(svg))
}

type Line = Vec<(f64, f64)>;

fn draw(
    svg: &mut String,
    metric: Metric,
    lines: &[(usize, Line)],
    powers: std::ops::Range<f64>,
) -> Result<(), Box<dyn std::error::Error>> {
    let root = SVGBackend::with_string(svg, SIZE).into_drawing_area();
    let mut chart = ChartBuilder::on(&root)
        .margin(8)
        .x_label_area_size(28)
        .y_label_area_size(44)
        .build_cartesian_2d(powers, 0.0..1.0)?;
    chart
        .configure_mesh()
        .light_line_style(WHITE)
        .x_label_formatter(&|power| metric.show(10f64.powf(*power)))
        .y_label_formatter(&|share: &f64| format!("{:.0} %", share * 100.0))
        .draw()?;
    for (index, line) in lines {
        let colour = PALETTE[index % PALETTE.len()];
        chart.draw_series(LineSeries::new(
            line.iter().map(|(time, share)| (time.log10(), *share)),
            colour.stroke_width(2),
        ))?;
    }
    root.present()?;
    Ok(())
}

/// The empirical distribution as a step function; needs two positive values.
fn steps(series: &Series) -> Option<Line> {
    let Series::Values(values) = series else { return None };
    let mut values: Vec<f64> = values.iter().copied().filter(|value| *value > 0.0).collect();
    if values.len() < 2 {
        return None;
    }
    values.sort_by(f64::total_cmp);
    let share = |index: usize| index as f64 / values.len() as f64;
    Some(values.iter().enumerate().flat_map(|(i, time)| [(*time, share(i)), (*time, share(i + 1))]).collect())
}

#[cfg(test)]
mod tests {
    use super::super::tests::results;
    use super::*;

    #[test]
    fn the_distribution_rises_from_zero_to_one() {
        let line = steps(&Series::Values(vec![0.2, 0.1])).unwrap();
        assert_eq!(line, [(0.1, 0.0), (0.1, 0.5), (0.2, 0.5), (0.2, 1.0)]);
        assert_eq!(steps(&Series::Values(vec![0.2])), None);
    }

    #[test]
    fn a_plot_has_a_line_per_participant() {
        let participants = ["bare client", "keblet"].map(str::to_owned);
        let results = results([0.070, 0.072, 0.300]);
        let svg = distribution(&participants, &results, Metric::ExitToRestarted).unwrap().unwrap();
        assert!(svg.starts_with("<svg"), "{svg}");
        assert!(svg.matches("stroke-width=\"2\"").count() == 2, "{svg}");
        assert_eq!(distribution(&participants, &results, Metric::IdleAgentCpu).unwrap(), None);
    }
}
