// One read port, one write port, one clock. See hw/rtl/core/sram.py.
module plora_sram #(
    parameter WIDTH = 512,
    parameter DEPTH = 1024,
    parameter ADDRESS_BITS = 10,
    parameter LANE_BITS = 512
) (
    input wire clk,
    input wire [ADDRESS_BITS-1:0] read_address,
    input wire read_enable,
    output reg [WIDTH-1:0] read_data,
    input wire [ADDRESS_BITS-1:0] write_address,
    input wire [WIDTH/LANE_BITS-1:0] write_enable,
    input wire [WIDTH-1:0] write_data
);
    reg [WIDTH-1:0] words [0:DEPTH-1];
    integer lane;

    always @(posedge clk) begin
        if (read_enable) read_data <= words[read_address];
        for (lane = 0; lane < WIDTH / LANE_BITS; lane = lane + 1)
            if (write_enable[lane])
                words[write_address][lane*LANE_BITS +: LANE_BITS] <= write_data[lane*LANE_BITS +: LANE_BITS];
    end
endmodule
